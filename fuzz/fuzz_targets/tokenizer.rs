//! libFuzzer on [`downbeat_fuzz::tokenizer`].
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| downbeat_fuzz::tokenizer(data));
