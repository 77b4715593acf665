# For type checkers and editors: what `__init__.py` imports on first use.
from qkscope.findings.fit import load_fit as load_fit
from qkscope.findings.singular_rows import singular_basis as singular_basis
from qkscope.sums.bases import thin_svd as thin_svd
from qkscope.sums.feature_split import alignment as alignment
from qkscope.sums.moments import Moments as Moments
from qkscope.sums.singular import SingularBasis as SingularBasis
from qkscope.sums.subspace import Subspace as Subspace
from qkscope.verbs.attribute import attribute as attribute
