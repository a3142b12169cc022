from tests.decode.conftest import one_thread as one_thread
