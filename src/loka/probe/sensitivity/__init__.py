"""What the loss feels when forward products are switched: estimated from gradients, tried where in doubt."""

from loka.probe.sensitivity.changes import Change, relative_change
from loka.probe.sensitivity.direct import DirectChanges, direct_changes, joint_change
from loka.probe.sensitivity.frozen import Evaluate
from loka.probe.sensitivity.scores import RowScores, predicted_joint, row_scores
from loka.probe.sensitivity.stand_in import RecipeProduct, StandIn, Switch, stand_in_of
from loka.probe.sensitivity.table import loss_changes

__all__ = [
    "Change",
    "DirectChanges",
    "Evaluate",
    "RecipeProduct",
    "RowScores",
    "StandIn",
    "Switch",
    "direct_changes",
    "joint_change",
    "loss_changes",
    "predicted_joint",
    "relative_change",
    "row_scores",
    "stand_in_of",
]
