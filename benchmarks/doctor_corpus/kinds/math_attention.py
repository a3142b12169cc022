"""Attention is held to the path that writes all scores to memory."""

from ..plant import Plant

ATTENTION = """class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        parts = self.qkv(self.norm(x)).view(-1, min(len(x), 1024), 3, WIDTH // HEAD, HEAD)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        return x + self.out(attention(q, k, v).transpose(1, 2).reshape(x.shape))
"""
HEAD = "HEAD = 8 if WIDTH < 64 else 64\n\n\ndef attention(q, k, v):\n    "
CALL = "return functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
PLANT = Plant(
    ("attention",),
    planted={
        "imports": "from torch.nn.attention import SDPBackend, sdpa_kernel",
        "classes": ATTENTION,
        "more_classes": f"{HEAD}with sdpa_kernel(SDPBackend.MATH):  # stall\n        {CALL}  # stall",
    },
    clean={"classes": ATTENTION, "more_classes": f"{HEAD}{CALL}"},
    dry=False,
)
