//! What a frontend has to know of a model version that it does not have: sent by the backend that has it, through the scheduler.

use std::io::{Read, Write};
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_preprocess::{MAX_FILE_BYTES, Recipe};
use downbeat_protocol::inference::ModelConfig;
use downbeat_repository::Batching;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::batch_codec::{BatchCodec, CodecParts};
use crate::refusal::FullBatch;

/// Most bytes of a packed `tokenizer.json` that are sent: schedulers and frontends are told of all models whenever one of them changes.
const LARGEST_FILE: usize = 8 << 20;

/// A model version as it is sent.
#[derive(Serialize, Deserialize)]
struct Sent {
    /// Its completed configuration, as its protocol buffer.
    config: Vec<u8>,
    codec: CodecParts,
    batching: Batching,
    slo: Option<Duration>,
    full: (u32, Duration),
    recipe: Option<SentRecipe>,
}

/// Steps to a model's inputs as they are sent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SentRecipe {
    /// As in an options file, in JSON.
    steps: Vec<u8>,
    /// The file that they need, packed.
    tokenizer: Option<Vec<u8>>,
}

impl SentRecipe {
    /// Packed.
    ///
    /// # Errors
    /// In words, if it is too large to be sent.
    pub fn pack(recipe: &Recipe) -> Result<Self, String> {
        let steps = serde_json::to_vec(&recipe.steps).map_err(|error| error.to_string())?;
        let pack = |file: &Vec<u8>| {
            let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
            packed.write_all(file).and_then(|()| packed.finish()).map_err(|error| error.to_string())
        };
        let tokenizer = recipe.tokenizer.as_ref().map(pack).transpose()?;
        match tokenizer.as_ref().map_or(0, Vec::len) {
            size if size > LARGEST_FILE => {
                Err(format!("its tokenizer.json has {size} bytes when packed, and at most {LARGEST_FILE} are sent"))
            }
            _ => Ok(SentRecipe { steps, tokenizer }),
        }
    }

    /// All bytes that it is made of.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.steps[..]).chain(self.tokenizer.as_deref())
    }

    /// As it was.
    ///
    /// # Errors
    /// In words, if it is none.
    pub fn unpack(&self) -> Result<Recipe, String> {
        let steps = serde_json::from_slice(&self.steps).map_err(|error| error.to_string())?;
        let unpack = |packed: &Vec<u8>| {
            let mut file = Vec::new();
            let read = ZlibDecoder::new(&packed[..]).take(MAX_FILE_BYTES + 1).read_to_end(&mut file);
            read.map_err(|error| error.to_string())?;
            if file.len() as u64 > MAX_FILE_BYTES {
                Err("its tokenizer.json is too large".to_owned())
            } else {
                Ok(file)
            }
        };
        Ok(Recipe { steps, tokenizer: self.tokenizer.as_ref().map(unpack).transpose()? })
    }
}

/// What requests of a model version have to be like, and when they have to be answered.
#[derive(Debug)]
pub struct Definition {
    /// Its completed configuration.
    pub config: ModelConfig,
    /// What its requests look like.
    pub codec: Arc<BatchCodec>,
    /// How they are queued.
    pub batching: Batching,
    /// From arrival to answer, as the backend serves it.
    pub slo: Option<Duration>,
    /// Its largest batch, as it was when it was loaded.
    pub full: FullBatch,
    /// The steps to its inputs, if it takes more than tensors.
    pub recipe: Option<Arc<SentRecipe>>,
}

impl Definition {
    /// As bytes.
    pub fn encode(&self) -> Vec<u8> {
        let sent = Sent {
            config: self.config.encode_to_vec(),
            codec: self.codec.parts(),
            batching: self.batching.clone(),
            slo: self.slo,
            full: (self.full.items, self.full.takes),
            recipe: self.recipe.as_deref().cloned(),
        };
        // Nothing of it can fail to be written; who gets nothing says so.
        postcard::to_allocvec(&sent).unwrap_or_default()
    }

    /// From bytes.
    ///
    /// # Errors
    /// In words, if it is none.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let sent: Sent = postcard::from_bytes(bytes).map_err(|error| error.to_string())?;
        let config = ModelConfig::decode(&*sent.config).map_err(|error| error.to_string())?;
        Ok(Definition {
            config,
            codec: Arc::new(sent.codec.into()),
            batching: sent.batching,
            slo: sent.slo,
            full: FullBatch { items: sent.full.0, takes: sent.full.1 },
            recipe: sent.recipe.map(Arc::new),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(tokenizer: Vec<u8>) -> Recipe {
        let steps =
            serde_json::json!([{ "step": "tokenize", "file": "tokenizer.json", "max_length": 8 }, { "step": "pad" }]);
        Recipe { steps: downbeat_preprocess::read_steps(&steps).unwrap(), tokenizer: Some(tokenizer) }
    }

    #[test]
    fn steps_and_their_file_come_as_they_were() {
        let recipe = recipe(b"{ }".repeat(1000));
        let sent = SentRecipe::pack(&recipe).unwrap();
        assert!(sent.parts().map(<[u8]>::len).sum::<usize>() < 1000, "it is packed");
        assert_eq!(sent.unpack().unwrap(), recipe);
    }

    #[test]
    fn files_that_are_too_large_or_garbage_are_refused() {
        // Numbers that cannot be packed.
        let noise =
            (0..4_000_000_u64).flat_map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).to_le_bytes()[..4].to_vec());
        let reason = SentRecipe::pack(&recipe(noise.collect())).unwrap_err();
        assert!(reason.contains("at most 8388608 are sent"), "{reason}");
        let bomb = SentRecipe::pack(&recipe(vec![0; MAX_FILE_BYTES as usize + 1])).unwrap();
        assert_eq!(bomb.unpack().unwrap_err(), "its tokenizer.json is too large");
        let garbled = SentRecipe { tokenizer: Some(b"no stream".to_vec()), ..bomb.clone() };
        assert!(garbled.unpack().is_err());
        assert!(SentRecipe { steps: b"[{}]".to_vec(), ..bomb }.unpack().is_err());
    }
}
