"""Post-training quantisation: a checkpoint rounded to few bits with calibration, written in a layout others read."""
