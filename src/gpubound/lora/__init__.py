"""Low-rank adapters over a frozen model, added in place.

add, remove            on the linear layers of any model, placed or not
parameters             what an optimizer is given
disable, enable        switched off, for a while or until further notice
"""

from .add import add as add, disable as disable, enable as enable, parameters as parameters, remove as remove

__all__ = ["add", "disable", "enable", "parameters", "remove"]
