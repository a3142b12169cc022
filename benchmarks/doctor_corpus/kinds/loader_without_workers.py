"""Batches are decoded in the training process, between the steps."""

from ..plant import Plant

ROWS = """PART = max(ROWS // 32, 1)  # rows of an item: all of them are more than one thread can pin, or /dev/shm hold


class Compressed(torch.utils.data.Dataset):
    def __init__(self):
        count = ROWS * WIDTH * torch.empty((), dtype=dtype).element_size()
        self.rows = [zlib.compress(bytes(max(count, 1 << 20)), 1) for _ in range(4)]

    def __len__(self):
        return 10_000

    def __getitem__(self, i):
        raw = bytearray(zlib.decompress(self.rows[i % 4]))  # stall
        x = torch.frombuffer(raw, dtype=dtype)[: 2 * PART * WIDTH].view(2, PART, WIDTH) + 1
        return x.unbind()
"""


def loader(arguments: str) -> str:
    return f'batches = torch.utils.data.DataLoader(Compressed(), batch_size=None, pin_memory=device.type != "cpu"{arguments})'


UPLOAD = "x, y = (rows.to(device, non_blocking=True).repeat(ROWS // PART, 1) for rows in (x, y))"
ALL = {"imports": "import zlib", "more_classes": ROWS, "upload": UPLOAD}
PLANT = Plant(
    ("data",),
    planted=ALL | {"data": loader("") + "  # stall"},
    clean=ALL | {"data": loader(", num_workers=WORKERS")},
    dry=False,
    loop=True,
)
