"""Types of the names that ``kedge`` imports when they are first used."""

__version__: str
from kedge.algorithms import Algorithm as Algorithm
from kedge.algorithms import grpo as grpo
from kedge.algorithms import ppo as ppo
from kedge.algorithms import reinforce_pp as reinforce_pp
from kedge.algorithms import remax as remax
from kedge.algorithms import rloo as rloo
from kedge.cli.model_arguments import ModelConfig as ModelConfig
from kedge.cli.model_arguments import get_peft_config as get_peft_config
from kedge.cli.model_arguments import get_quantization_config as get_quantization_config
from kedge.config.grpo import GRPOConfig as GRPOConfig
from kedge.config.ppo import PPOConfig as PPOConfig
from kedge.config.rloo import RLOOConfig as RLOOConfig
from kedge.ext.open_instruct.config import AsyncPPOConfig as AsyncPPOConfig
from kedge.ext.open_instruct.trainer import AsyncPPOTrainer as AsyncPPOTrainer
from kedge.ext.trl.ppov2 import PPOv2Config as PPOv2Config
from kedge.ext.trl.ppov2 import PPOv2Trainer as PPOv2Trainer
from kedge.ext.trl.scripts import ScriptArguments as ScriptArguments
from kedge.ext.trl.scripts import TrlParser as TrlParser
from kedge.ext.trl.scripts import get_kbit_device_map as get_kbit_device_map
from kedge.trainers.grpo import GRPOTrainer as GRPOTrainer
from kedge.trainers.ppo import PPOTrainer as PPOTrainer
from kedge.trainers.rloo import RLOOTrainer as RLOOTrainer
