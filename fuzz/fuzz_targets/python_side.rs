//! libFuzzer on [`downbeat_fuzz::python_side`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::python_side(data));
