//! libFuzzer on [`downbeat_fuzz::labels`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::labels(data));
