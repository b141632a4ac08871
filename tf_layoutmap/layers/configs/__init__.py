"""Feature configs and schedules that Keras programs hand in."""
