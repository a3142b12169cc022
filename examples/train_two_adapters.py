"""Two adapters of one model learn opposite tasks through `gpubound serve`: to write even tokens, and odd ones.

gpubound serve path/to/base                     in one terminal
python examples/train_two_adapters.py [URL]     in another one, or on another machine
"""

import sys

from gpubound.serve import Client

PROMPTS, SAMPLES, TOKENS = [[1, 2, 3], [4, 5], [6]], 8, 8
TASKS = {"even": 0, "odd": 1}  # the remainder of the tokens that are rewarded


def reward(tokens: list[int], remainder: int) -> float:
    return sum(token % 2 == remainder for token in tokens) / len(tokens)


def main(url: str = "http://127.0.0.1:8400", steps: int = 20) -> dict[str, float]:
    client, rewards = Client(url), dict[str, float]()
    for name in TASKS:
        client.create(name, rank=8, lr=1e-2)
    for step in range(steps):
        for name, remainder in TASKS.items():
            answers = client.sample(name, PROMPTS, n=SAMPLES, max_new_tokens=TOKENS, seed=step, stop=[])
            scores = [reward(one["tokens"], remainder) for one in answers]
            rewards[name] = sum(scores) / len(scores)
            examples = [
                {
                    "prompt": PROMPTS[one["prompt"]],
                    "answer": one["tokens"],
                    "logprobs": one["logprobs"],
                    "advantage": score - rewards[name],
                }
                for one, score in zip(answers, scores)
            ]
            client.forward_backward(name, examples, "grpo")
            client.optim_step(name)
        print(f"step {step + 1:3}  " + "  ".join(f"{name} {value:.2f}" for name, value in rewards.items()), flush=True)
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
