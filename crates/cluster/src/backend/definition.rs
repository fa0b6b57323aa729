//! The definition of a model version for frontends, which do not have the model. Backends send it
//! through the scheduler.

use std::io::{Read, Write};
use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_host::request::batch_codec::{BatchCodec, CodecParts};
use downbeat_preprocess::{MAX_FILE_BYTES, Recipe};
use downbeat_protocol::inference::ModelConfig;
use downbeat_repository::Batching;
use downbeat_service::refusal::FullBatch;
use flate2::Compression;
use flate2::read::ZlibDecoder;
use flate2::write::ZlibEncoder;
use prost::Message;
use serde::{Deserialize, Serialize};

/// The most bytes of a packed `tokenizer.json` that is sent. Each change of one model sends all
/// models to schedulers and frontends again.
const LARGEST_FILE: usize = 8 << 20;

/// A model version in the form that is sent.
#[derive(Serialize, Deserialize)]
struct Sent {
    fingerprint: String,
    /// The completed configuration, as its protocol buffer.
    config: Vec<u8>,
    codec: CodecParts,
    batching: Batching,
    slo: Option<Duration>,
    full: (u32, Duration),
    recipe: Option<SentRecipe>,
    step_times: Vec<Duration>,
}

/// The steps to a model's inputs, in the form that is sent.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct SentRecipe {
    /// The steps in JSON, like in an options file.
    steps: Vec<u8>,
    /// The file that the steps need, packed.
    tokenizer: Option<Vec<u8>>,
}

impl SentRecipe {
    /// Packs the steps and their file.
    ///
    /// # Errors
    /// In words, if the file is too large to be sent.
    pub fn pack(recipe: &Recipe) -> Result<Self, String> {
        let steps = serde_json::to_vec(&recipe.steps).map_err(|error| error.to_string())?;
        let pack = |file: &Vec<u8>| {
            let mut packed = ZlibEncoder::new(Vec::new(), Compression::default());
            packed.write_all(file).and_then(|()| packed.finish()).map_err(|error| error.to_string())
        };
        let tokenizer = recipe.tokenizer.as_ref().map(pack).transpose()?;
        match tokenizer.as_ref().map_or(0, Vec::len) {
            size if size > LARGEST_FILE => {
                Err(format!("the model's tokenizer.json has {size} bytes when packed; the most is {LARGEST_FILE}"))
            }
            _ => Ok(SentRecipe { steps, tokenizer }),
        }
    }

    /// All bytes of the packed steps.
    pub fn parts(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.steps[..]).chain(self.tokenizer.as_deref())
    }

    /// Unpacks the steps and their file.
    ///
    /// # Errors
    /// In words, if the bytes are not packed steps.
    pub fn unpack(&self) -> Result<Recipe, String> {
        let steps = serde_json::from_slice(&self.steps).map_err(|error| error.to_string())?;
        let unpack = |packed: &Vec<u8>| {
            let mut file = Vec::new();
            let read = ZlibDecoder::new(&packed[..]).take(MAX_FILE_BYTES + 1).read_to_end(&mut file);
            read.map_err(|error| error.to_string())?;
            if file.len() as u64 > MAX_FILE_BYTES {
                Err("the model's tokenizer.json is too large".to_owned())
            } else {
                Ok(file)
            }
        };
        Ok(Recipe { steps, tokenizer: self.tokenizer.as_ref().map(unpack).transpose()? })
    }
}

/// The requirements on requests of a model version, and the time for their answers.
#[derive(Debug)]
pub struct Definition {
    /// Identifies the version's files and configuration.
    pub fingerprint: String,
    /// The completed configuration of the model.
    pub config: ModelConfig,
    /// The form of the model's requests.
    pub codec: Arc<BatchCodec>,
    /// How the requests are queued.
    pub batching: Batching,
    /// The time from arrival to answer that the backend serves the model with.
    pub slo: Option<Duration>,
    /// The model's largest batch, as it was at loading.
    pub full: FullBatch,
    /// The steps to the model's inputs, if it takes more than tensors.
    pub recipe: Option<Arc<SentRecipe>>,
    /// `l(1)` of each step of an ensemble, as they were at loading.
    pub step_times: Vec<Duration>,
}

impl Definition {
    /// The definition as bytes.
    pub fn encode(&self) -> Vec<u8> {
        let sent = Sent {
            fingerprint: self.fingerprint.clone(),
            config: self.config.encode_to_vec(),
            codec: self.codec.parts(),
            batching: self.batching.clone(),
            slo: self.slo,
            full: (self.full.items, self.full.takes),
            recipe: self.recipe.as_deref().cloned(),
            step_times: self.step_times.clone(),
        };
        // Encoding cannot fail. An empty result fails in `decode`, which reports it.
        postcard::to_allocvec(&sent).unwrap_or_default()
    }

    /// Reads a definition from bytes.
    ///
    /// # Errors
    /// In words, if the bytes are not a definition.
    pub fn decode(bytes: &[u8]) -> Result<Self, String> {
        let sent: Sent = postcard::from_bytes(bytes).map_err(|error| error.to_string())?;
        let config = ModelConfig::decode(&*sent.config).map_err(|error| error.to_string())?;
        Ok(Definition {
            fingerprint: sent.fingerprint,
            config,
            codec: Arc::new(sent.codec.into()),
            batching: sent.batching,
            slo: sent.slo,
            full: FullBatch { items: sent.full.0, takes: sent.full.1 },
            recipe: sent.recipe.map(Arc::new),
            step_times: sent.step_times,
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
        // Bytes that cannot be unpacked.
        let noise =
            (0..4_000_000_u64).flat_map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32).to_le_bytes()[..4].to_vec());
        let reason = SentRecipe::pack(&recipe(noise.collect())).unwrap_err();
        assert!(reason.contains("the most is 8388608"), "{reason}");
        let bomb = SentRecipe::pack(&recipe(vec![0; MAX_FILE_BYTES as usize + 1])).unwrap();
        assert_eq!(bomb.unpack().unwrap_err(), "the model's tokenizer.json is too large");
        let garbled = SentRecipe { tokenizer: Some(b"no stream".to_vec()), ..bomb.clone() };
        assert!(garbled.unpack().is_err());
        assert!(SentRecipe { steps: b"[{}]".to_vec(), ..bomb }.unpack().is_err());
    }
}
