"""The main job from end to end on one machine: prefill, drop half of the KV, decode on."""
