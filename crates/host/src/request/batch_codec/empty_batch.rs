//! Requests without items: `[0, 3, 224, 224]` is answered with outputs such as `[0, 1000]`.
//!
//! The sizes of an output's items may vary, so that only a run of the model tells them. Many
//! kernels take no tensor without elements. So one made-up item runs for the empty request, and its
//! rows are cut from the answer.

use bytes::Bytes;
use downbeat_service::error::ServiceError;

use super::{Admitted, BatchCodec, OutputPart, Outputs, PROFILED_LENGTH};

/// The most bytes of an item that is made up for a request. A request without items sends no bytes,
/// so its item must be small.
const LARGEST: usize = 4 << 20;

impl BatchCodec {
    /// Makes an item for a request without items, with the item sizes `shapes` of its inputs.
    ///
    /// # Errors
    /// `InvalidArgument` if an item takes more than 4 MiB and its sizes vary, or the model has no
    /// item that can be made up.
    pub(super) fn standing_in(&self, model: &str, shapes: &[i64]) -> Result<Admitted, ServiceError> {
        let refused = |reason: String| {
            ServiceError::InvalidArgument(format!(
                "model '{model}' does not answer a request without rows: {reason}. Send at least one row"
            ))
        };
        if !self.has_varying_shapes() {
            if self.stand_in.get().is_none() {
                let item = self.trial(PROFILED_LENGTH).map_err(refused)?;
                // A request beside this one may have been faster.
                let _ = self.stand_in.set(Admitted { is_empty: true, ..item });
            }
            return self
                .stand_in
                .get()
                .cloned()
                .ok_or_else(|| refused("the made-up row for such requests is missing".to_owned()));
        }
        let bytes = self.bytes_of(shapes).filter(|bytes| *bytes <= LARGEST);
        bytes.ok_or_else(|| refused(format!("one row of these sizes takes more than {LARGEST} bytes")))?;
        let item = self.filled(self.fill, shapes).map_err(refused)?;
        Ok(Admitted { is_empty: true, ..item })
    }

    /// The outputs of a request without items: from the outputs of its made-up item, or else as
    /// declared.
    ///
    /// # Errors
    /// Why the item was not answered, where the sizes of an output are not fixed.
    pub fn without_rows(&self, outputs: Result<Outputs, ServiceError>) -> Result<Outputs, ServiceError> {
        let empty = |sizes: &[i64]| OutputPart { shape: [&[0], sizes].concat(), data: Bytes::new() };
        match outputs {
            Ok(outputs) => Ok(outputs.iter().map(|part| empty(part.shape.get(1..).unwrap_or(&[]))).collect()),
            Err(error @ ServiceError::Internal(_)) => {
                let declared = self.outputs.iter().map(|output| self.item_dims(&output.client.dims));
                let known = declared.map(|sizes| sizes.iter().all(|size| *size >= 0).then(|| empty(sizes)));
                known.collect::<Option<_>>().ok_or_else(|| {
                    error.within("the server answers a request without rows with a run of one made-up row")
                })
            }
            Err(error) => Err(error),
        }
    }
}
