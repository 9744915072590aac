# ruff: noqa: I001 - themes, not the alphabet
# The public names, by theme. This list is the only one: oarjax/__init__.py reads it and imports each name on first use.
# A name is stable once it stands here; `name as name` tells type checkers that it is exported.

# equations
from oarjax.rl.advantages import group_advantages as group_advantages, AdvantageFunction as AdvantageFunction
from oarjax.rl.surrogates import clipped_surrogate as clipped_surrogate, cispo_surrogate as cispo_surrogate
from oarjax.rl.loss import kl_estimate as kl_estimate, aggregate as aggregate, policy_loss as policy_loss

# importance: the answer, the probe, OAR-P, OAR-F, OAR-L, screened OAR-P, OAR-G
from oarjax.credit.answer_span import find_answers as find_answers
from oarjax.credit.probe import Probe as Probe, Reading as Reading, outcome_probe as outcome_probe
from oarjax.credit.oar.oar_p import masked_token_importance as masked_token_importance
from oarjax.credit.oar.oar_f import fisher_importance as fisher_importance
from oarjax.credit.oar.oar_l import local_importance as local_importance
from oarjax.credit.oar.oar_screened import screened_scores as screened_scores, top_share as top_share
from oarjax.credit.oar.oar_g import gradient_importance as gradient_importance, row_keys as row_keys

# weights
from oarjax.credit.gate import (
    normalise as normalise,
    gate as gate,
    preserve_mass as preserve_mass,
    oar_weights as oar_weights,
    reshape as reshape,
)

# diagnostics
from oarjax.credit.diagnose import (
    ess_ratio as ess_ratio,
    top_mass as top_mass,
    spearman as spearman,
    recall_at_k as recall_at_k,
)

# custom credit methods
from oarjax.credit.method import CreditMethod as CreditMethod
from oarjax.credit.signals import Context as Context, CreditInputs as CreditInputs, Scored as Scored, Signals as Signals

# what loss.function and optim.function name
from oarjax.step.loss import TokenLoss as TokenLoss
from oarjax.rl.optimizer import OptimizerFunction as OptimizerFunction

# policies and sampling
from oarjax.models.policy import Policy as Policy, RowCaches as RowCaches
from oarjax.rollout.check_policy import check_policy as check_policy
from oarjax.models.qwen import make_policy as make_policy
from oarjax.models.qwen_config import QwenConfig as QwenConfig
from oarjax.data.hf import read_config as read_config, load_params as load_params, export as export
from oarjax.rollout.sampler import sample as sample
from oarjax.rollout.logps import token_logps as token_logps

# types
from oarjax.types import (
    PromptBatch as PromptBatch,
    Rollout as Rollout,
    AnswerSpan as AnswerSpan,
    Credit as Credit,
    TrainBatch as TrainBatch,
    Mean as Mean,
    TrainState as TrainState,
    KVCache as KVCache,
    Grades as Grades,
    Params as Params,
)

# rewards
from oarjax.grading.rewards import Sample as Sample, reward as reward

# training, and custom loops
from oarjax.config.loading import load_config as load_config
from oarjax.config.schema import Config as Config
from oarjax.step.programs import Shardings as Shardings, make_optimizer as make_optimizer, make_steps as make_steps
from oarjax.step.iteration import HostCallbacks as HostCallbacks, iterate as iterate
from oarjax.step.host_callbacks import GradedAtOnce as GradedAtOnce
from oarjax.run.run import Run as Run

# commands, and what notebooks show
from oarjax.notebook import (
    train as train,
    credit_lab as credit_lab,
    open_run as open_run,
    show_curves as show_curves,
    show_completions as show_completions,
    show_tokens as show_tokens,
    show_credit as show_credit,
    show_lab as show_lab,
    show_lab_figure as show_lab_figure,
)

__version__: str
__all__: list[str]
