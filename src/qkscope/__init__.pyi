# For type checkers and editors: what `__init__.py` imports on first use.
from qkscope import sums as sums
from qkscope.errors import BadInput as BadInput
from qkscope.examples import Example as Example
from qkscope.findings.shipped_atlas import load_atlas as load_atlas
from qkscope.model.dictionary import Dictionary as Dictionary
from qkscope.model.scope import Scope as Scope
from qkscope.results.result import Result as Result
from qkscope.show.page import write_report as write_report
from qkscope.show.patterns import show_pattern as show_pattern
from qkscope.texts import tasks as tasks
from qkscope.verbs.atlas.atlas import atlas as atlas
from qkscope.verbs.decompose import decompose as decompose
from qkscope.verbs.find_heads import find_heads as find_heads
from qkscope.verbs.path_patch import path_patch as path_patch
from qkscope.verbs.sparsity import sparsity as sparsity
from qkscope.verbs.swap.swap import swap as swap
from qkscope.verbs.trace.trace import trace as trace
from qkscope.verbs.why.why import why as why

__version__: str
