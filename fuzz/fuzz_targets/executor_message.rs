//! libFuzzer on [`downbeat_fuzz::executor_message`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::executor_message(data));
