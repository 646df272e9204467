"""The main job: observe, profile, plan, train by the plan, compare."""
