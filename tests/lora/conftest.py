from ..place.conftest import reference_kernels as reference_kernels
