def queue_history():
    """The file of `decide.queue.history`; an empty text where there is none."""
    history = (CONFIG["decide"]["queue"] or {}).get("history")
    return str(Path(history).expanduser()) if history else ""


ADDED["decide"].inputs.append(queue_history)
