"""GRPO on grade-school word problems, on-policy to the bit: `python -m recipes.grpo_gsm8k`.

One page: draw groups of completions, reward them, prove that the trainer computes the very bits
they were drawn with, step, publish the weights. The rest of recipes/ is what this page calls.
"""

import sys
from collections.abc import Sequence

from recipes.command_line import is_ours, parse
from recipes.settings import RunConfig


def run(config: RunConfig) -> dict[str, str]:
    """Do the whole run; name -> path of what it wrote (nothing for a dry run).

    Raises:
        ValueError: a setting or input that cannot work, in one line with the mend.
        ParityError: in bitwise mode, bits differ; nothing was updated with them.
    """
    from recipes import models, plan, run_folder, runtime
    from recipes.drawing import draw_groups
    from recipes.job import Job, Stopwatch
    from recipes.task import load_task

    folder = run_folder.choose(config)
    model_folder = models.local_folder(config.model, folder.path.parent / "models")
    task = load_task(config, model_folder)
    print("\n".join(plan.plan_lines(config, task, model_folder, folder.path)), flush=True)
    if config.dry_run:
        return {}
    run_folder.prepare(folder, config)
    config = plan.with_kv_pages(config, task, model_folder)
    with runtime.start(config, model_folder) as sides, Job(config, folder, task, sides) as job:
        for step in range(job.begin(), config.steps):
            watch = Stopwatch()
            drawn = draw_groups(config, task, job.source, job.published[0], watch)
            samples = job.samples(step, drawn)
            watch("reward")
            stats = job.update(drawn.trained(samples))
            watch("train")
            job.sync_weights()
            watch("sync")
            job.log_step(step, drawn, samples, stats, watch.seconds)
            job.finish_step(step)
        return job.end()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 1 after a one-line error."""
    try:
        run(parse(arguments))
    except KeyboardInterrupt:
        print("interrupted: --resume auto goes on from the last checkpoint", file=sys.stderr)
        return 130
    except Exception as error:
        if not is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
