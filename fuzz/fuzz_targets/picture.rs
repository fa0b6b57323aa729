//! libFuzzer on [`downbeat_fuzz::picture`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::picture(data));
