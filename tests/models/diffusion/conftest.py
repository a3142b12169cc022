from tests.decode.conftest import one_thread as one_thread
from tests.train.conftest import corpus as corpus
