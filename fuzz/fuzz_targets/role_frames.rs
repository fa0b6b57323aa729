//! libFuzzer on [`downbeat_fuzz::role_frames`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::role_frames(data));
