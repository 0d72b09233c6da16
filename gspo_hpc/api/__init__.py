"""The Python interface: what `gspo_hpc` offers under its own name. Nothing here imports torch."""

from gspo_hpc.api.configs import load_config as load_config
from gspo_hpc.api.configs import with_algorithm as with_algorithm
from gspo_hpc.api.configs import with_environment as with_environment
from gspo_hpc.api.configs import with_observer as with_observer
from gspo_hpc.api.configs import with_reward as with_reward
from gspo_hpc.api.configs import with_settings as with_settings
from gspo_hpc.api.launching import RunFailed as RunFailed
from gspo_hpc.api.launching import plan as plan
from gspo_hpc.api.launching import submit as submit
from gspo_hpc.api.launching import train as train
from gspo_hpc.api.run import Run as Run
from gspo_hpc.api.run import open_run as open_run
