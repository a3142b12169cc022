"""Place a Hugging Face Llama: move it to the device, swap in verified kernels, train a few steps, and read the record.

python examples/place_a_llama.py        (a small random model: seconds on a CPU, or on a GPU if there is one)
"""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import gpubound as gb

torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=256,
    tie_word_embeddings=True,
)
model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # before or after placing: the parameters stay the same objects

placement = gb.place(model)
print(placement)

text = torch.tensor([list(b"a model is placed once, then trained as ever: " * 4)], device=placement.device)
model.train()
for step in range(60):
    loss = model(input_ids=text, labels=text).loss  # all logits at once are never in memory
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 19:
        print(f"step {step + 1}: loss {loss.item():.3f}")

model.eval()
prompt = text[:, :46]
print(bytes(model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 46:].tolist()))

slower = {row.module: row.reasons for row in placement.rows if row.fallbacks}
print("calls that took a slower path:", slower or "none")
placement.undo()  # the model's own classes again, with the trained weights
