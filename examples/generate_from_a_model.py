"""Sample from a model while it is trained. The decoder reads the live weights, so the next token knows the last step.

python examples/generate_from_a_model.py      (a small model of bytes: seconds on a CPU, or on a GPU if there is one)
"""

import torch

import gpubound as gb

TEXT = b"a decoder reads the weights where they lie, so what was learned a moment ago is what it says. " * 8


class Bytes:
    """All that a decoder needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(tokens).decode(errors="replace")


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = gb.Decoder(gb.DecoderConfig(hidden=128, intermediate=256, layers=1, heads=4, kv_heads=2, vocabulary=256)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fast = gb.decoder(model, max_batch=4, max_length=256, tokenizer=Bytes())
    print(fast)

    ids = torch.tensor(list(TEXT), device=device)
    for step in range(1, 121):
        batch = ids[torch.randint(len(ids) - 64, (8, 1), device=device) + torch.arange(64, device=device)]
        loss = model.loss(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 30 == 0:  # there is no second copy of the weights, so nothing has to be updated
            print(f"step {step}, loss {loss.item():.2f}: {fast.generate('a decoder', max_new_tokens=60).texts[0]!r}")

    for _, piece in fast.stream("so what", max_new_tokens=120, temperature=0.5, top_p=0.9, seed=1, stop="."):
        print(piece, end="", flush=True)
    found = fast.generate("a decoder", n=4, max_new_tokens=100, temperature=0.6, logprobs=True)
    best = max(found.sequences, key=lambda sequence: sum(sequence.logprobs))
    print(f"\nlikeliest of 4: {best.text[:40]!r}; {found.count} tokens by {found.launches} launches")


if __name__ == "__main__":
    main()
