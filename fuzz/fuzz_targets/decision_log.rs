//! libFuzzer on [`downbeat_fuzz::decision_log`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::decision_log(data));
