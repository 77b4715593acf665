# For type checkers and editors: what `__init__.py` imports on first use.
from qkscope import tasks as tasks
from qkscope.analyses.atlas import atlas as atlas
from qkscope.analyses.decompose import decompose as decompose
from qkscope.analyses.find import find_heads as find_heads
from qkscope.analyses.fit import load as load
from qkscope.analyses.sparsity import sparsity as sparsity
from qkscope.analyses.split import attribute as attribute
from qkscope.analyses.split import singular_basis as singular_basis
from qkscope.analyses.swap import swap as swap
from qkscope.analyses.trace.trace import trace as trace
from qkscope.analyses.why.why import why as why
from qkscope.capture.scope import Scope as Scope
from qkscope.errors import BadInput as BadInput
from qkscope.examples import Example as Example
from qkscope.heads import Head as Head
from qkscope.maths.attribution import alignment as alignment
from qkscope.maths.bases import thin_svd as thin_svd
from qkscope.maths.dictionaries import Dictionary as Dictionary
from qkscope.maths.moments import Moments as Moments
from qkscope.maths.subspace import Subspace as Subspace
from qkscope.runs.result import Result as Result
from qkscope.show.gallery import write_gallery as write_gallery
from qkscope.show.live import view as view
from qkscope.show.page import write_report as write_report

__version__: str
