"""A loop without models for tests of callbacks, and callbacks that watch or stop it."""

from contextlib import nullcontext
from types import SimpleNamespace

from transformers import TrainerCallback, TrainingArguments

from kedge.checkpoint import checkpoint
from kedge.loop.loop import Engine
from kedge.trainers.hf_callbacks import Callbacks
from kedge.trainers.hooks.checkpoints import Checkpoints
from kedge.trainers.hooks.evaluations import Evaluations
from kedge.trainers.hooks.logging import Logging

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Memory:
    """A tracker that keeps everything."""

    def __init__(self):
        self.rows = []

    def log(self, metrics, *, step):
        self.rows.append({"step": step, **metrics})


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
        control.should_training_stop |= state.global_step >= self.step


def args(folder, **kwargs):
    defaults = {"save_strategy": "no", "logging_steps": 1, "report_to": "none", "use_cpu": True}
    return TrainingArguments(output_dir=str(folder), **(defaults | kwargs))


class Loop(Engine):
    """The real loop, without anything to sample or train."""

    def __init__(self, learner, sizes):
        self.learner, self.batch_sizes, self.clock, self.max_lag = learner, sizes, float, 0
        self.rollout_engine, self.step, self.state_consistent = Nothing(), 0, True
        self.scheduler, self.hooks = Nothing(), ()

    def _collector(self):
        return None

    def _next_sample(self):
        return SimpleNamespace(rollout=None, reward_output=None)

    def _weight_update(self):
        return None

    def train_on(self, sample, *, begin=None):
        for hook in self.hooks:
            hook.on_optimizer_step()
        self.step += 1
        return {
            "objective/scores": float(self.step),
            "episode": self.step * 8.0,
            "lr": 2 / 2**self.step,
        }


class Nothing:
    """An engine and a scheduler with nothing to do."""

    logprob_kind = "none"

    def open(self, step, until):
        return nullcontext()

    def __getattr__(self, name):
        return lambda *args: None


class Saving(Checkpoints):
    def write(self):
        self.trainer.saved.append(self.engine.step)
        return checkpoint.save(
            self.root,
            self.engine.step,
            {"n": self.engine.step},
            write_models=self.callbacks.write_state,
        )


class Run:
    """A loop without models: the score is the step, evaluations return ``evals`` in turn."""

    stopped_by = None

    def __init__(self, arguments, callbacks=(), *, max_steps=4, steps_per_epoch=2.0, evals=()):
        self.args, self.memory, self.max_steps = arguments, Memory(), max_steps
        self.learner = SimpleNamespace(world_size=1, all_reduce=lambda x: x)
        self.callbacks = Callbacks(arguments, callbacks, tracker=self.memory)
        self.engine = Loop(self.learner, SimpleNamespace(epoch_length=steps_per_epoch))
        self.callbacks.start(model="the model")
        self.evals, self.saved, self.evaluated_at = iter(evals), [], []

    @property
    def state(self):
        return self.callbacks.state

    def evaluate(self):
        self.evaluated_at.append(self.state.global_step)
        metrics = {"eval_objective/scores": next(self.evals, 0.0)}
        self.callbacks.log(metrics)
        self.callbacks.fire("on_evaluate", metrics=metrics)
        return metrics

    def begin(self):
        parts = {
            **{"trainer": self, "args": self.args, "engine": self.engine, "eval_sets": [1]},
            **{"learner": self.learner, "callbacks": self.callbacks, "tokenizer": None},
            **{"metric_names": lambda row: {}, "fresh_reference": True},
        }
        epochs = self.max_steps / self.engine.batch_sizes.epoch_length
        self.callbacks.begin(max_steps=self.max_steps, epochs=epochs, batch_size=8)
        logging = Logging(**parts, clock=iter(range(1000)).__next__)
        self.engine.hooks = [logging, Evaluations(**parts), Saving(**parts)]
        return logging

    def train(self, resume=None):
        if resume is not None:
            self.callbacks.restore(resume)
            self.engine.step = self.state.global_step
        logging = self.begin()
        if self.args.eval_on_start:
            self.evaluate()
        self.engine.run(self.max_steps)
        if row := logging.take_pending():
            self.callbacks.log(row)
        self.callbacks.fire("on_train_end")
        return self
