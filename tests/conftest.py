"""One thread for tiny tensors: on small work, threads of parallel tests only wait for each other."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
