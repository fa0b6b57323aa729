//! libFuzzer on [`downbeat_fuzz::repair`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::repair(data));
