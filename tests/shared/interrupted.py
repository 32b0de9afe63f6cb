"""A checkpointer that stands for Ctrl-C."""

from llm_utils.recovery import checkpoint


def interrupted_after(iteration):
    """A Checkpointer: Ctrl-C right after the checkpoint of this iteration, once in a run."""

    class Interrupted(checkpoint.Checkpointer):
        def save(self):
            saved = super().save()
            if self.last[0]["run"]["iteration"] == iteration and not (self.folder.parent / "interrupted").exists():
                (self.folder.parent / "interrupted").touch()
                raise KeyboardInterrupt
            return saved

    return Interrupted
