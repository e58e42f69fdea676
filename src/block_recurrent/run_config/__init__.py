"""`RunConfig`: everything that defines a training run, besides the model. Validated on creation; no torch here.

Values come from four places, each overriding the one before: the defaults of the sections, the preset of the system and
size, a TOML file, and flags. The result is complete, and is saved with the run as `config.toml`.
"""

from block_recurrent.run_config.fine_tuning import check_same_tokenizer, fine_tuning_values
from block_recurrent.run_config.resolve import default_optimizer, differences, merge, parse_settings, read_toml, resolve
from block_recurrent.run_config.sections import (
    DTYPES,
    PARALLEL,
    SECTIONS,
    TUNE,
    DataConfig,
    EvalConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    check_keys,
)
