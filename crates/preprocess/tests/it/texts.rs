//! Texts.

use serde_json::json;

use super::*;

fn inputs(dims: &[i64]) -> [TensorSpec; 2] {
    [spec("input_ids", DataType::Int64, dims), spec("attention_mask", DataType::Int64, dims)]
}

fn steps(truncate: bool, pad: Value) -> Value {
    let tokenize = json!({ "step": "tokenize", "file": "tokenizer.json", "max_length": 6, "truncate": truncate });
    json!([tokenize, pad, { "step": "mask" }])
}

#[test]
fn texts_are_tokenised_filled_up_to_the_longest_and_masked() {
    let pipeline = pipeline(&steps(false, json!({ "step": "pad" })), &inputs(&[-1, -1])).unwrap();
    let made = run(&pipeline, &[b"This is good", b"sad"]).unwrap();
    assert_eq!((made[0].name.as_str(), made[0].shape.as_slice()), ("input_ids", &[2, 5][..]));
    // [CLS] this is good [SEP], and [CLS] sad [SEP] [PAD] [PAD].
    assert_eq!(integers(&made[0]), [2, 17, 14, 4, 3, 2, 11, 3, 0, 0]);
    assert_eq!(integers(&made[1]), [1, 1, 1, 1, 1, 1, 1, 1, 0, 0]);
}

#[test]
fn padding_to_a_length_makes_every_text_so_long() {
    let pipeline = pipeline(&steps(false, json!({ "step": "pad", "length": 8 })), &inputs(&[-1, 8])).unwrap();
    let made = run(&pipeline, &[b"sad"]).unwrap();
    assert_eq!(integers(&made[0]), [2, 11, 3, 0, 0, 0, 0, 0]);
}

#[test]
fn what_is_too_long_is_cut_or_refused_as_the_steps_say() {
    let text: &[u8] = b"this is so very very good";
    let cut = pipeline(&steps(true, json!({ "step": "pad" })), &inputs(&[-1, -1])).unwrap();
    // The token at the end of the text stays.
    assert_eq!(integers(&run(&cut, &[text]).unwrap()[0]), [2, 17, 14, 19, 20, 3]);
    let refused = pipeline(&steps(false, json!({ "step": "pad" })), &inputs(&[-1, -1])).unwrap();
    let said = run(&refused, &[b"good", text]).unwrap_err().to_string();
    assert!(said.starts_with("item 1 of input 'text': the text has 8 tokens, but the model takes at most 6"), "{said}");
    let long = vec![b'a'; downbeat_preprocess::MAX_TEXT_BYTES + 1];
    assert!(run(&cut, &[&long]).unwrap_err().to_string().contains("at most 262144"));
}

#[test]
fn what_is_not_utf_8_says_so_and_an_empty_text_is_one() {
    let pipeline = pipeline(&steps(false, json!({ "step": "pad" })), &inputs(&[-1, -1])).unwrap();
    let said = run(&pipeline, &[b"\xff\xfe"]).unwrap_err().to_string();
    assert!(said.contains("the text is not UTF-8"), "{said}");
    assert_eq!(integers(&run(&pipeline, &[b""]).unwrap()[0]), [2, 3]);
}

#[test]
fn without_padding_texts_of_a_request_are_equally_long() {
    let tokenize = json!([{ "step": "tokenize", "file": "tokenizer.json", "max_length": 6 }]);
    let pipeline = pipeline(&tokenize, &inputs(&[-1, -1])).unwrap();
    assert_eq!(run(&pipeline, &[b"good", b"bad"]).unwrap().len(), 1, "the mask is sent by the client");
    let said = run(&pipeline, &[b"good", b"so good"]).unwrap_err().to_string();
    assert!(said.contains("3 to 4 tokens") && said.contains("'pad'"), "{said}");
}

#[test]
fn a_tokenizer_file_is_read_without_its_mark_or_named_for_its_content() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("tokenizer.json");
    let written = json!([{ "step": "tokenize", "file": "tokenizer.json", "max_length": 6 }]);
    let read = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Recipe::read(read_steps(&written).unwrap(), |file| Ok(folder.path().join(file)))
    };
    assert_eq!(read("\u{feff}{}".as_bytes()).unwrap().tokenizer.unwrap(), b"{}");
    for (bytes, words) in [
        (&b"version https://git-lfs.github.com/spec/v1\nsize 466247\n"[..], "is a git-lfs pointer to 466247 bytes"),
        (b"\xff\xfe{\0}\0", "is UTF-16 text"),
    ] {
        let said = read(bytes).unwrap_err();
        assert_eq!(said.find("step 1, 'tokenize': "), Some(0));
        assert!(said.contains(&format!("{} {words}", path.display())), "{said}");
    }
    let outside = Recipe::read(read_steps(&written).unwrap(), |_| Err("it lies elsewhere".to_owned()));
    assert_eq!(outside.unwrap_err(), "step 1, 'tokenize': it lies elsewhere");
}

/// Both files make the tokenizers' library panic.
#[test]
fn a_tokenizer_that_the_library_panics_on_is_refused_with_a_reason() {
    let good = std::fs::read_to_string(Path::new(EXAMPLES).join("models/sentence/tokenizer.json")).unwrap();
    let steps = read_steps(&steps(false, json!({ "step": "pad" }))).unwrap();
    let take = |tokenizer: String| {
        let recipe = Recipe { steps: steps.clone(), tokenizer: Some(tokenizer.into_bytes()) };
        Pipeline::new(&recipe, &inputs(&[-1, -1]), true, u64::MAX).map(|pipeline| run(&pipeline, &[b"good"]))
    };
    let said = take(good.replacen('{', r#"{"decoder": "\ud800","#, 1)).unwrap_err();
    assert!(said.contains("is not a readable tokenizer.json"), "{said}");
    let mut written: Value = serde_json::from_str(&good).unwrap();
    written["post_processor"]["special_tokens"] = json!({});
    let said = take(written.to_string()).unwrap_err();
    assert!(said.contains("tokenises no text"), "{said}");
}
