//! Downbeat under virtual time: production code of `downbeat-core`, emulated devices, outside checkers.
