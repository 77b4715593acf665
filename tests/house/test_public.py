"""The public names: few, each imported on first use; those that moved are found for one version."""

import subprocess
import sys

import pytest

import qkscope as qk


def test_there_are_about_eighteen_names_and_a_shelf_of_mathematics():
    assert len(qk.__all__) <= 22, "a name that few need stands in its own module"
    assert {"Scope", "why", "trace", "sums", "tasks"} <= set(qk.__all__)
    assert {"singular_basis", "alignment", "Subspace"} <= set(qk.sums.__all__)


def test_importing_the_package_imports_no_torch():
    code = "import sys, qkscope, qkscope.sums; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"


@pytest.mark.parametrize("name", qk._MOVED)
def test_a_name_that_moved_says_where_it_is_now(name):
    with pytest.warns(DeprecationWarning, match=f"qkscope.{name} goes .* use {qk._MOVED[name]}"):
        old = getattr(qk, name)
    module, _, new_name = qk._MOVED[name].rpartition(".")
    assert old is getattr(sys.modules[module], new_name)
    assert name not in dir(qk)


def test_a_name_that_never_was_is_refused():
    with pytest.raises(AttributeError, match="module 'qkscope' has no attribute 'heed'"):
        _ = qk.heed
    with pytest.raises(AttributeError, match=r"module 'qkscope\.sums' has no attribute 'heed'"):
        _ = qk.sums.heed


def test_a_scope_is_loaded_by_the_name_that_others_give_it_too():
    assert qk.Scope.from_pretrained("nano:mixed", device="cpu").n_layers == 3
