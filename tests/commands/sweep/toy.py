"""A recipe without training: accuracy is a function of the settings, and runs can fail or be interrupted."""

RECIPE = """
import json, os, sys, time
from toolkit.run.cli import parse
from toolkit.run.config.run import RunConfig, to_dict
from toolkit.errors import require


class Config(RunConfig):
    labels: int = 100
    rate: float = 0.0
    behave: str = "well"

    def check_together(self):
        super().check_together()
        require(self.labels > 0, "labels", self.labels, "take one or more")


def full():
    return Config()


PRESETS = {"full": full}

if __name__ == "__main__":
    config = parse(PRESETS, sys.argv[1:])
    folder = config.run_dir
    folder.mkdir(exist_ok=True)
    with open(folder.parent / "starts.txt", "a") as starts:
        starts.write(f"{config.labels} {config.rate} {config.seed}\\n")
    labels = {name: value for name, value in os.environ.items() if name.startswith("WANDB_")}
    (folder / "wandb.json").write_text(json.dumps(labels))
    if config.behave == "badly" and config.seed == 1:
        sys.exit("error: out of luck.")
    if config.behave == "slowly" and not (folder / "half").exists():
        import signal

        def leave(number, frame):
            (folder / "half").touch()
            os._exit(75)

        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        time.sleep(60)
    (folder / "config.json").write_text(json.dumps({"recipe": "toy", **to_dict(config)}))
    accuracy = 0.9 - config.rate / 10 + config.labels / 10_000 + config.seed / 100
    (folder / "results.json").write_text(json.dumps({"test_accuracy": accuracy, "test_loss": 1.0, "device": "cpu"}
        | ({"validation_accuracy": accuracy} if config.validation else {})))
"""
