"""A loop without models for tests of callbacks, and callbacks that watch or stop it."""

from types import SimpleNamespace

from transformers import TrainerCallback, TrainingArguments

from kedge.checkpoint import checkpoint
from kedge.loop.updater import StepReport
from kedge.trainers import run
from kedge.trainers.hf_callbacks import Callbacks

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


class Run(run.Run):
    """A loop without models: the score is the step, evaluations return ``evals`` in turn."""

    def __init__(self, arguments, callbacks=(), *, max_steps=4, steps_per_epoch=2.0, evals=()):
        self.memory, self.max_steps = Memory(), max_steps
        sizes = SimpleNamespace(iterations_per_epoch=steps_per_epoch)
        super().__init__(
            trainer=self,
            args=arguments,
            engine=SimpleNamespace(batch_sizes=sizes),
            learner=SimpleNamespace(world_size=1, all_reduce=lambda x: x),
            callbacks=Callbacks(arguments, callbacks, tracker=self.memory),
            eval_sets=[1],
            tokenizer=None,
            fresh_reference=True,
            metric_names=lambda row: {},
            clock=iter(range(1000)).__next__,
        )
        self.callbacks.start(model="the model")
        self.evals, self.saved, self.evaluated_at = iter(evals), [], []

    def evaluate(self):
        self.evaluated_at.append(self.state.global_step)
        metrics = {"eval_objective/scores": next(self.evals, 0.0)}
        self.callbacks.log(metrics)
        self.callbacks.fire("on_evaluate", metrics=metrics)
        return metrics

    def save_checkpoint(self):
        self.saved.append(self.state.global_step)
        return checkpoint.save(
            self.callbacks.args.output_dir,
            self.state.global_step,
            {"n": self.state.global_step},
            write_models=self.callbacks.write_state,
        )

    def begin(self, max_steps):
        epochs = max_steps / self.iterations_per_epoch
        self.callbacks.begin(max_steps=max_steps, epochs=epochs, batch_size=8)
        self.start()

    def train(self, resume=None):
        if resume is not None:
            self.callbacks.restore(resume)
        self.begin(self.max_steps)
        if self.args.eval_on_start:
            self.evaluate()
        for step in range(self.state.global_step, self.max_steps):
            self.on_step_begin(step)
            self.on_optimizer_step()
            metrics = {
                "objective/scores": float(step + 1),
                "episode": (step + 1) * 8.0,
                "lr": 1 / 2**step,
            }
            report = StepReport(step=step + 1, metrics=metrics, rollout=None, reward_output=None)
            if self.on_step_end(report):
                break
        self.end_epoch()
        if row := self.take_pending():
            self.callbacks.log(row)
        self.callbacks.fire("on_train_end")
        return self
