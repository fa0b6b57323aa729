//! What a frontend has to know of a model version that it does not have: sent by the backend that has it, through the scheduler.

use std::sync::Arc;

use downbeat_core::Duration;
use downbeat_protocol::inference::ModelConfig;
use downbeat_repository::{Batching, ModelDefinition};
use prost::Message;
use serde::{Deserialize, Serialize};

use crate::batch_codec::{BatchCodec, CodecParts};
use crate::refusal::FullBatch;

/// A model version as it is sent.
#[derive(Serialize, Deserialize)]
struct Sent {
    /// Its completed configuration, as its protocol buffer.
    config: Vec<u8>,
    codec: CodecParts,
    batching: Batching,
    slo: Option<Duration>,
    full: (u32, Duration),
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
}

impl Definition {
    /// As bytes.
    pub fn encode(model: &ModelDefinition, codec: &BatchCodec, slo: Option<Duration>, full: FullBatch) -> Vec<u8> {
        let (config, batching) = (model.config.encode_to_vec(), model.batching.clone());
        let sent = Sent { config, codec: codec.parts(), batching, slo, full: (full.items, full.takes) };
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
        })
    }
}
