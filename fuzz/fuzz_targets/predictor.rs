//! libFuzzer on [`downbeat_fuzz::predictor`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::predictor(data));
