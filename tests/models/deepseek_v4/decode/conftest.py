from tests.decode.conftest import kernels_path as kernels_path, one_thread as one_thread
