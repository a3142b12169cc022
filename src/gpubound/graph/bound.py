"""What stays the one object that it is, in the process that made it."""

from typing import Any, ClassVar


class Bound:
    """Its graphs read memory of this process at fixed addresses, so a copy would work on the original's tensors."""

    INSTEAD: ClassVar[str]  # what to do

    def __reduce_ex__(self, protocol: Any) -> Any:  # pickle, torch.save, copy.copy and copy.deepcopy all ask this
        raise TypeError(
            f"{type(self).__name__}: it can be neither pickled nor copied, because its graphs hold addresses of this process's "
            f"memory; {self.INSTEAD}."
        )
