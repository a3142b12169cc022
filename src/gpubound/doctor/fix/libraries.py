"""Settings of libraries that copy batches or check a loss themselves: accelerate, Hugging Face's Trainer, Lightning.

accelerator = Accelerator()        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
trainer = Trainer(args=args)       args.accelerator_config.non_blocking = True
                                   trainer = Trainer(args=args)

accelerate and Lightning do not pin the memory of a DataLoader that the script makes; Trainer makes and pins its loader.
"""

from .source import Edit, Patch, Refused, SourceText, imported, keywords_of, last_name, name_of, with_keywords

CONFIGURATION = "from accelerate.utils import DataLoaderConfiguration"


def propose_accelerate(source: SourceText, line: int) -> list[Edit]:
    calls = [call for call in source.calls() if last_name(call) == "Accelerator"]
    if not calls:
        return _before_trainer(source, "accelerator_config.non_blocking = True")
    edits = imported(source, CONFIGURATION)
    for call in calls:
        if chosen := {"dataloader_config", "split_batches"} & keywords_of(source, call).keys():
            raise Refused(f"line {call.lineno} passes {min(chosen)}; add non_blocking=True to its DataLoaderConfiguration")
        edits += with_keywords(source, call, dataloader_config="DataLoaderConfiguration(non_blocking=True)")
    return [*edits, *_pinned(source)]


def propose_pinned(source: SourceText, line: int) -> list[Edit]:
    """Propose pinned memory for the DataLoaders of this file, whose batches the library copies with non_blocking=True."""
    if not (edits := _pinned(source)):
        raise Refused("there is no DataLoader in this file without pin_memory")
    return edits


def _pinned(source: SourceText) -> list[Edit]:
    loaders = [call for call in source.calls() if last_name(call) == "DataLoader"]
    return [
        edit
        for call in loaders
        if "pin_memory" not in keywords_of(source, call)
        for edit in with_keywords(source, call, pin_memory="True")
    ]


def propose_unfiltered(source: SourceText, line: int) -> list[Edit]:
    """Propose that Trainer logs every loss, instead of reading each to see whether it is finite."""
    return _before_trainer(source, "logging_nan_inf_filter = False")


def _before_trainer(source: SourceText, setting: str) -> list[Edit]:
    """Return an edit that changes the arguments of the file's one Trainer before it is made."""
    trainers = [call for call in source.calls() if last_name(call).endswith("Trainer") and not call.args[1:]]
    arguments = [(call, name_of(keyword.value)) for call in trainers for keyword in call.keywords if keyword.arg == "args"]
    if len(arguments) != 1 or not arguments[0][1]:
        raise Refused("there is no single Trainer(args=...) in this file that is given its arguments by a name")
    ((call, name),) = arguments
    if setting.partition(" ")[0].encode() in source.data:
        raise Refused(f"the file sets {setting.partition(' ')[0]} itself")
    statement = source.statement(call)
    return [source.inserted_line(statement.lineno, f"{source.indent(statement)}{name}.{setting}")]


ACCELERATE = Patch(
    "accelerate", frozenset({"h2d"}), "accelerate copies from pinned memory without waiting", propose_accelerate,
    via="accelerate/utils/operations.py",
)  # fmt: skip
PIN_LOADERS = Patch(
    "pin_loaders", frozenset({"h2d", "pageable"}), "Lightning copies from pinned memory", propose_pinned,
    via="fabric/utilities/apply_func.py",
)  # fmt: skip
UNFILTERED = Patch(
    "unfiltered", frozenset({"sync"}), "a loss that is not finite is logged, too", propose_unfiltered, asked=True,
    via="transformers/trainer.py",
)  # fmt: skip
