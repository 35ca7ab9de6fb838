from benchmarks.support.task_order import TaskOrder as TaskAfterTask

__all__ = ["TaskAfterTask"]
