"""The device is waited for at the end of every step."""

from ..plant import Plant

PLANT = Plant(("sync",), planted={"report": "torch.get_device_module(device).synchronize()  # stall"})
