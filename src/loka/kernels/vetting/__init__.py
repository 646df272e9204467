"""Vetting: no kernel is believed. `vet` and `Vetting` for plans, `examine` for all that was found."""

from loka.kernels.vetting.cache import Vetting
from loka.kernels.vetting.examine import examine, vet
from loka.kernels.vetting.repro import repro_name, repro_script
from loka.kernels.vetting.verdict import Data, Trial, Verdict

__all__ = ["Data", "Trial", "Verdict", "Vetting", "examine", "repro_name", "repro_script", "vet"]
