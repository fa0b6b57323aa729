//! libFuzzer on [`downbeat_fuzz::config_pbtxt`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::config_pbtxt(data));
