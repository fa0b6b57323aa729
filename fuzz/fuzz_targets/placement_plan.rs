//! libFuzzer on [`downbeat_fuzz::placement_plan`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::placement_plan(data));
