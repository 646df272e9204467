"""Models of operands, fitted to learned statistics: what rows are drawn from once the real ones are gone."""

from loka.probe.distributions.copula import Copula
from loka.probe.distributions.matrix_normal import MatrixNormal
from loka.probe.distributions.mvn import IndependentNormal, MultivariateNormal

__all__ = ["Copula", "IndependentNormal", "MatrixNormal", "MultivariateNormal"]
