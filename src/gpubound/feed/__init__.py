"""Data on the device, from any iterable: resident when it fits, through a pinned ring when it does not.

feed      looks at the source, the device and the memory, and chooses             choose.py
Feed      batches, epoch after epoch, from a position that can be saved            epochs.py
Source    what is read: a list, single items, a DataLoader, any iterable           source.py
Resident  batches kept on the device, guarded against writes                       resident.py
Ring      batches read and copied ahead by a thread                                ring.py
Tree      a batch's leaves, padded and packed into one run of bytes                leaves.py
"""

from .choose import feed
from .epochs import Feed, Stats

__all__ = ["Feed", "Stats", "feed"]
