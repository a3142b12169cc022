"""Famous patterns where they cost nothing: a finding here is wrong, unless it is listed as harmless."""

from .plant import Calm

COPIED = "x, y = x.to(device), y.to(device)"
DECOYS: dict[str, Calm] = {
    # the read is of a loss that was done long ago
    "item_of_an_old_loss": Calm(
        {
            "setup": "state.losses, state.total = [], 0.0",
            "report": "state.losses.append(loss.detach())\nif step % 50 == 49:\n    state.total += state.losses[0].item()",
        }
    ),
    "item_of_a_cpu_tensor": Calm(
        {"setup": "state.count = torch.zeros(())", "report": "state.count += 1\nstate.shown = state.count.item()"}
    ),
    "download_every_500_steps": Calm({"report": "if step % 500 == 499:\n    state.kept = loss.detach().cpu()"}, "trainer"),
    # the tensors are on the device already, so nothing is copied
    "to_where_it_is": Calm({"upload": COPIED}, "helper"),
    # no workers, but an item is a view
    "loader_without_work": Calm(
        {
            "data": "\n".join(
                (
                    "pairs = [(host_rows().to(device), host_rows().to(device)) for _ in range(4)] * 1000",
                    "batches = torch.utils.data.DataLoader(pairs, batch_size=None, num_workers=0)",
                )
            )
        }
    ),
    "synchronize_before_the_loop": Calm({"setup": "torch.get_device_module(device).synchronize()"}, "trainer"),
}
