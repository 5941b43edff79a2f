"""A loop without models for tests of callbacks, and callbacks that watch or stop it."""

from pathlib import Path
from types import SimpleNamespace

from transformers import TrainerCallback, TrainingArguments

from kedge.backends.trackers import Memory
from kedge.engine.checkpoint import checkpoint
from kedge.engine.hooks import StepReport
from kedge.trainers.run.hf_callbacks import Callbacks
from kedge.trainers.run.hooks import RunHooks

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Spy(TrainerCallback):
    def __init__(self):
        self.events = []
        self.seen = {}

    def __getattribute__(self, name):
        if name not in EVENTS:
            return super().__getattribute__(name)

        def event(args, state, control, **kwargs):
            self.events.append(name)
            self.seen[name] = kwargs

        return event


class StopAt(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def args(folder, **kwargs):
    defaults = {"save_strategy": "no", "logging_steps": 1, "report_to": "none", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **(defaults | kwargs))


class Run:
    """A loop without models: the score is the step, evaluations return ``evals`` in turn."""

    def __init__(self, arguments, callbacks=(), *, max_steps=4, steps_per_epoch=2.0, evals=()):
        self.args, self.memory, self.max_steps = arguments, Memory(), max_steps
        self.callbacks = Callbacks(arguments, callbacks, tracker=self.memory)
        self.callbacks.start(model="the model")
        self.evals, self.saved, self.evaluated_at = iter(evals), [], []
        self.iterations_per_epoch = steps_per_epoch
        self.evaluator = SimpleNamespace(sets=[1], evaluate=self.evaluate)
        self.learner = SimpleNamespace(world_size=1, total=lambda x: x)

    def metric_names(self, row):
        return {}

    def check_first_batch(self, rollout, reward_output):
        pass

    def root(self):
        return Path(self.args.output_dir)

    @property
    def state(self):
        return self.callbacks.state

    def evaluate(self):
        self.evaluated_at.append(self.state.global_step)
        metrics = {"eval_objective/scores": next(self.evals, 0.0)}
        self.callbacks.evaluated(metrics)
        return metrics

    def save_checkpoint(self):
        self.saved.append(self.state.global_step)
        return checkpoint.save(
            self.callbacks.args.output_dir,
            self.state.global_step,
            {"n": self.state.global_step},
            write_models=self.callbacks.write_state,
        )

    def train(self, resume=None):
        if resume is not None:
            self.callbacks.restore(resume)
        self.callbacks.begin(
            max_steps=self.max_steps,
            epochs=self.max_steps / self.iterations_per_epoch,
            batch_size=8,
        )
        hooks = RunHooks(self, clock=iter(range(1000)).__next__)
        hooks.evaluate_at_start()
        for step in range(self.state.global_step, self.max_steps):
            hooks.on_step_begin(step)
            hooks.on_sample(step, None, None)
            hooks.on_optimizer_step()
            metrics = {
                "objective/scores": float(step + 1),
                "episode": (step + 1) * 8.0,
                "lr": 1 / 2**step,
            }
            report = StepReport(step=step + 1, metrics=metrics, rollout=None, reward_output=None)
            if hooks.on_step_end(report):
                break
        hooks.end_pass()
        self.callbacks.fire("on_train_end")
        return self
